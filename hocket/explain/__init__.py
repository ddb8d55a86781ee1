"""What was decided about a run, why, and what it will do: `hocket explain`, and a file in the folder of every run.

explanation.py   the object, its JSON, and as text for people
build.py         the object, made of settings: what is hidden under what, prediction, units, groups and memory; what
                 traces show beside it
"""
