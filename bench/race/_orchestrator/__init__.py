"""The race of the orchestrator: its workloads, contenders, worker and figures."""
