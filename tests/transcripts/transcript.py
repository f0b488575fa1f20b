"""A transcript: blocks of commands, a line `----`, what came of them, and a blank line."""

from pathlib import Path

from tests.transcripts.interpreter import Interpreter

FOLDER = Path(__file__).parent
SEPARATOR = "----"


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.txt"))


def replay(text: str) -> str:
    """Return the transcript with its answers as they are now."""
    interpreter = Interpreter()
    blocks = []
    for block in text.strip().split("\n\n"):
        commands = block.partition(f"\n{SEPARATOR}\n")[0].removesuffix(f"\n{SEPARATOR}")
        if all(line.startswith("#") for line in commands.splitlines()):
            blocks.append(commands)
            continue
        answer = interpreter.run(commands.splitlines())
        blocks.append(f"{commands}\n{SEPARATOR}\n{answer}")
    return "\n\n".join(blocks) + "\n"
