"""`python -m tests.harness.docs`: writes every page that is generated from the code."""

from tests.harness.docs.pages import PAGES

if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text())
