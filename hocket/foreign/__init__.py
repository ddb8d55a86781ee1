"""Settings of other systems in hocket's words: Megatron-LM, Megatron Bridge, torchtitan and DeepSpeed.

read.py        words, files and JSON of other systems -> names and values
entry.py       what an entry of a table can say of a setting
megatron.py, bridge.py, torchtitan.py, deepspeed.py      the tables
translate.py   names and values -> hocket's settings, and what has no counterpart, in words
"""
