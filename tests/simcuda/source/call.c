/* What every API call goes through: the lock's gate, ordered faults, a context's lasting error. */
#define _GNU_SOURCE
#include "sim.h"

#include <unistd.h>

_Thread_local Call *current_call;

static void gate_leave(void) {
    pthread_mutex_lock(&sim.mutex);
    sim.in_flight--;
    pthread_cond_broadcast(&sim.progress);
    pthread_mutex_unlock(&sim.mutex);
}

CUresult call_begin(Call *call, const char *name) {
    *call = (Call){.name = name, .fault = -1};
    current_call = NULL;
    if (!sim.initialized || sim.pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED; /* also in a forked child */
    if (sim_worker_thread) return CUDA_ERROR_NOT_PERMITTED; /* a host function makes no CUDA calls */
    pthread_mutex_lock(&sim.mutex);
    while (sim.gate_closed && !sim.stopping) process_wait();
    int stopping = sim.stopping;
    if (!stopping) sim.in_flight++;
    pthread_mutex_unlock(&sim.mutex);
    if (stopping) return CUDA_ERROR_DEINITIALIZED;
    count_call(sim.world, name);
    Fault fault;
    int index = fault_take(sim.world, name, sim.pid, 0, &fault);
    if (index >= 0) {
        if (fault.scope != SCOPE_CALL) {
            call->fault = index;
            call->scope = fault.scope;
        } else if (fault.point == POINT_AFTER) {
            call->fault = index;
        } else {
            CUresult error = fault_act(sim.world, index, sim.pid, 0);
            if (error != CUDA_SUCCESS) {
                gate_leave();
                return error;
            }
        }
    }
    Context *context = context_current();
    if (context && context->alive && context->error) {
        gate_leave();
        return context->error;
    }
    current_call = call;
    return CUDA_SUCCESS;
}

CUresult call_end(Call *call, CUresult result) {
    current_call = NULL;
    if (call->fault >= 0 && call->scope == SCOPE_CALL) {
        CUresult error = fault_act(sim.world, call->fault, sim.pid, 0);
        if (error != CUDA_SUCCESS) result = error;
    }
    gate_leave();
    return result;
}
