"""What was decided about a run, why, and what it will do: `hocket explain`, and a file in the folder of every run.

explanation.py   the object and its JSON
overlaps.py      what is hidden under what
predicted.py     what the plan's simulation says of it
parts.py         units, groups and memory
build.py         all of it together
text.py          as a table for people
"""
