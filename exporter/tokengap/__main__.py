"""``python -m tokengap``."""

from tokengap.cli import main

if __name__ == "__main__":
    main(prog_name="tokengap")
