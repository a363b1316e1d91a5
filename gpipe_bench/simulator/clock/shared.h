/* What Python and C both name, as C: see table.h. */

#ifndef SHARED_H
#define SHARED_H

#include <stdint.h>

typedef struct {
#define NUMBER(name) int64_t name;
#define COLUMN(type, name) const type *name;
#include "table.h"
} Input;

enum {
#define STEP(name) STEP_##name,
#include "table.h"
};

enum {
#define ACTION(name) ACTION_##name,
#include "table.h"
};

enum {
#define KIND(name) KIND_##name,
#include "table.h"
};

/* Columns of `works`: for each kind of computation these four, then the rest. */
enum { WORK_ns, WORK_launches, WORK_adding_ns, WORK_adding_launches, WORK_each };
enum { WORK_output_bytes = WORK_each * (KIND_backward_weights + 1), WORK_nodes, WORK_learns, WORK_columns };

#endif
