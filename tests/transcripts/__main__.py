"""Write all transcripts anew: `python -m tests.transcripts`. Read the diff before you keep it."""

from tests.transcripts.transcript import paths, replay

if __name__ == "__main__":
    for path in paths():
        before = path.read_text()
        after = replay(before)
        if after != before:
            path.write_text(after)
            print(f"{path.name} has changed: keep it only if you understand why")
