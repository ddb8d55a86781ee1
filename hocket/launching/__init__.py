"""How the ranks of a run start, meet and end.

    hocket train  ──fork──►  rank 0 .. world - 1     this host, one command
    torchrun / srun  ──────► hocket train            each process is one worker already

launch.py     the common start: resolve settings, check them, run a job
parent.py     forks, watches and ends workers; explains in one message why a run failed
worker.py     one rank: its rendezvous, the run's folder, and what it reports when it fails
agreement.py  checks that ranks have the same settings, and tests the chosen copy engines
"""
