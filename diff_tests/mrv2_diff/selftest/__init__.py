"""The harness tested: does it find planted faults, and only those?"""
