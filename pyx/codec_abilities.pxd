from ckptpipe.pyx.cuda_driver cimport Driver


cdef int engine_mask(Driver driver, int device) noexcept
cdef int engine_longest(Driver driver, int device) noexcept
cdef str engine_missing(Driver driver, int device, int mask, int longest)
cdef bytes kernels_for(Driver driver, int device)
