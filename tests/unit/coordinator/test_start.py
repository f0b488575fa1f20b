"""A restarted coordinator is waited for: sessions load nothing of the admin port."""

import subprocess
import sys

HEAVY = ("fastapi", "starlette", "uvicorn", "prometheus_client", "torch", "vllm", "numpy")


def test_sessions_do_not_wait_for_the_admin_port_s_modules() -> None:
    code = f"import sys, coordinator.__main__; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
