/* Driver calls one after another, while something is made: the first that fails ends it, and is named in *call. */

#ifndef CKPTPIPE_CUDA_STEPS_H
#define CKPTPIPE_CUDA_STEPS_H

#include "cuda_driver.h"

#define TRY(expression, name)                  \
    do {                                       \
        cu_result tried = (expression);        \
        if (tried != CU_OK) {                  \
            *call = (name);                    \
            return tried;                      \
        }                                      \
    } while (0)

/* Load compiled kernels. CU_NOT_FOUND where this driver cannot launch any. */
static inline int ck_load_kernels(const ck_cuda *cuda, cu_module *module, const void *image, const char **call) {
    if (cuda->module_load == NULL || cuda->module_function == NULL || cuda->launch == NULL) {
        *call = "cuGetProcAddress(cuLaunchKernel)";
        return CU_NOT_FOUND;
    }
    TRY(cuda->module_load(module, image), "cuModuleLoadData");
    return 0;
}

#endif
