"""`hocket doctor`: whether this host is fit for overlap, and what its GPUs and links reach.

`checks.py` inspects the host and judges it. `measure.py` starts ranks that time products and transfers; `rank.py` is
one of them.
"""
