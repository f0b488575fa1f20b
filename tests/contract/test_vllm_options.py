"""Options of vLLM's own server that the gateway does not offer."""

import pytest

from gateway.engine import app
from worker.demo import MODEL_DIR


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--allowed-headers", '["x"]'),
        ("--allowed-origins=", '["*"]'),
        ("--ssl-keyfile", "key.pem"),
        ("--api-key", "sk"),
        ("--port", "9"),
        ("--root-path", "/v2"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(option: str, value: str) -> None:
    args = [option + value] if option.endswith("=") else [option, value]
    with pytest.raises(ValueError, match=f"{option.rstrip('=')} is not offered: .*[.]$"):
        app.configure(str(MODEL_DIR), "demo", args)
