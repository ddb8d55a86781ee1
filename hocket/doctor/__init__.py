"""`hocket doctor`: is this host fit for overlap, and what does each thing that is not cost? And what it measures.

`look.py` finds values, `checks.py` judges them, reads nothing itself, and says it. `measure.py` starts ranks that time
products and transfers; `rank.py` is one of them.
"""
