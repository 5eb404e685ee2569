// COLLECTIVE_perf: time and bandwidth of a collective against size, as nccl-tests shows them.
// One source for all of them: PYCOLL_PERF_COLLECTIVE names the row of the table of collectives, or
// sendrecv.
#include "perf/run.h"

int main(int argc, char** argv) { return pycoll::perf::run(PYCOLL_PERF_COLLECTIVE, argc, argv); }
