"""FastDeploy's output ops by their names, for engines that are not ours: `sysv` (FastDeploy's
System V queue, numpy and any CPU tensor), `paddle` (the same as Paddle operators) and `shm` (a
pipeline's shared memory)."""
