"""`python -m fedkin` is the same as `fedkin`."""

from fedkin.cli import main

if __name__ == "__main__":
    main()
