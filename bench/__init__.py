"""The benchmarks: every measure of the fused input layer that has a floor, in one command. Read README.md here."""
