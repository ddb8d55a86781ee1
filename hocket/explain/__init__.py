"""The decisions about a run, their reasons, and the predicted step: `hocket explain`, and a file in every run's folder.

explanation.py   the object, its JSON, and its text
build.py         builds the object from settings: what hides which communication, prediction, units, groups, memory, and
                 what traces show
"""
