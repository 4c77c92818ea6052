// Chunk kernels for any machine.
#include "cpu/lanes_portable.h"

#define SET portable
#include "cpu/chunk_kernels.inl"
