"""How the ranks of a run start, meet and end.

    hocket train  ──fork──►  rank 0 .. world - 1     this host, one command
    torchrun / srun  ──────► hocket train            each process is one worker already

launch.py     what both begin with
parent.py     workers are forked, watched, and told to end; why a run failed, in one message
worker.py     one rank, where it meets others, the folder that it writes to, and what it says when it fails
agreement.py  ranks that were started with unlike settings; copy engines that were chosen are tried
"""
