"""Settings of other systems in hocket's words: Megatron-LM, Megatron Bridge, torchtitan and DeepSpeed.

read.py        words, files and JSON of other systems -> names and values
*.toml         the tables, a row for each setting of a system
entry.py       what a row can say of a setting: the rules that rows name
megatron.py, torchtitan.py, deepspeed.py      rules of one system alone, and what it does where nothing is given
translate.py   names and values -> hocket's settings, and what has no counterpart, in words
"""
