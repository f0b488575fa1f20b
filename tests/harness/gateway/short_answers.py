"""What a leader of the test's answers where only the front end is tried."""

from tests.harness.cells.gateway_cell import Ran


async def answer_shortly(ran: Ran) -> None:
    """Three tokens, with all log-probabilities that the request asks for."""
    params = ran.request.sampling_params
    asked = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs")}
    most = {name: 5 if top == -1 else top for name, top in asked.items()}
    ran.tokens(0, [300, 301, 302], "length", **most)
