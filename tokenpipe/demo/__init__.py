"""`tokenpipe demo`: a launcher, an engine with a real language model, and a client.

Reading order: launcher (the processes), engine (continuous batching over model), client (submits,
collects), log (what was sampled against what was delivered), lines and screen (what is shown).
It uses tokenpipe only through its public names, as any engine would.
"""
