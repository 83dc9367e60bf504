"""`python -m fa4build`, for where the script is not on the path."""

from fa4build.cli import main

if __name__ == "__main__":
    main()
