"""Entry point of `python -m gradwire`."""

from gradwire.workbench.cli import main

if __name__ == "__main__":
    main()
