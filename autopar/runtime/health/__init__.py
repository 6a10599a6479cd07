"""Health: how ranks spend their time, and which of them are slow.

step_times      the last minute of this rank: computing, waiting by axis, outside of steps
slow_ranks      ranks compared with others that do the same
health_watch    what ranks publish with their heartbeats, and the warning

Stands on `runtime.mesh`, `runtime.fault` and the waits of `runtime.comm`.
"""
