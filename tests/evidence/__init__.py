"""``make evidence``: does training end where FP32 ends, at each level?"""
