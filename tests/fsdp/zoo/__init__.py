"""A zoo of training programs as people write them. Each one trains unsharded, under FSDP2 and under hocket.

`program.py` has what a program is given, `judge.py` what is said of it; the other files have the programs.
`python -m benchmarks.zoo` runs all of them, `tests/fsdp/test_zoo.py` those that are quick.
"""
