"""How the ranks of a run start, meet and end.

    hocket train  ──fork──►  rank 0 .. world - 1     this host, one command
    torchrun / srun  ──────► hocket train            each process is one worker already

launch.py     what both begin with
parent.py     workers are forked, watched, and told to end
worker.py     one rank, and what it says when it fails
agreement.py  ranks that were started with unlike settings
copies.py     copy engines that were chosen are tried
children.py   a worker as its parent sees it; why a run failed, in one message
ports.py      where ranks meet
folder.py     the folder of a run
"""
