/* Texts of faults and deadlocks. */
#ifndef FA4BUILD_NATIVE_REPORT_H
#define FA4BUILD_NATIVE_REPORT_H

#include "core.h"

/* Sets status and report of the launch: every live warp, what it waits for, who could release it. */
void report_deadlock(Run *run);

#endif
