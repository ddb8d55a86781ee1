"""`hocket doctor`: is this host fit for overlap, and what does each thing that is not cost?

`look.py` finds values, `checks.py` judges them and reads nothing itself, `report.py` says it.
"""
