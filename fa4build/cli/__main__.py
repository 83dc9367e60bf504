"""`python -m fa4build.cli`, for where the script is not on the path."""

from fa4build.cli import main

main()
