"""Files and batches of the OpenAI API: records, their stores, the runner, and the routes."""
