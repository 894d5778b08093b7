"""The benchmark: `python -m bench`. Read README.md."""
