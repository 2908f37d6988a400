"""NVFP4 as data: the block size and the largest finite values of its two number formats.

A block is 16 consecutive values along the last axis that share one e4m3 scale. A code is an
e2m1 number (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two packed into a byte, the even
index in the low nibble.
"""

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
