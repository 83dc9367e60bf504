"""`python -m fa4build.cli`, as `python -m fa4build`."""

from fa4build.cli import main

if __name__ == "__main__":
    main()
