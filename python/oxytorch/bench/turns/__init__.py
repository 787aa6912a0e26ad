"""Contenders as processes that take turns, so that only one computes at any time: the demo, the races and the gate.

A contender's process has this folder as the package ``oxytorch_turns``, so that rivals never import oxytorch.
"""
