"""Entry point of `python -m train`."""

from train.main import main

main()
