"""A package that stands in for torchvision, of which the registry has no build for torch's CPU one.

transformers' image processors import it, and vLLM's classes of multimodal models import those. For
text alone nothing of it is called: each name is an empty class.
"""

from pathlib import Path

ANY_NAME = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
MODES = """
import enum

class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
"""
FILES = {
    "__init__.py": '__version__ = "0.28.0"',
    "io.py": ANY_NAME,
    "transforms/__init__.py": MODES,
    "transforms/functional.py": f"from torchvision.transforms import InterpolationMode\n{ANY_NAME}",
    "transforms/v2/__init__.py": ANY_NAME,
    "transforms/v2/functional.py": ANY_NAME,
}


def write_stand_in(folder: Path) -> Path:
    """Write the package; returns the folder that PYTHONPATH must name."""
    for name, text in FILES.items():
        path = folder / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
