"""The gateway: vLLM's OpenAI front end, with the cell's coordinator and leaders for its engine."""
