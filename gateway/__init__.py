"""The gateway: vLLM's OpenAI front end on the client's side, the cell's coordinator and leaders behind it."""
