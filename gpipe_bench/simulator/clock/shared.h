/* What Python and C both name, as C: see table.h. */

#ifndef SHARED_H
#define SHARED_H

#include <stdint.h>

typedef struct {
#define NUMBER(name) int64_t name;
#define COLUMN(type, name) const type *name;
#include "table.h"
} Input;

typedef struct {
#define RESULT(name) int64_t name;
#include "table.h"
} Result;

typedef struct {
#define RECORD(type, name) type *name;
#include "table.h"
} RecordColumns;

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

enum {
    WORK_before = 2 * (KIND_backward_weights + 1) - 1, /* durations and launches */
#define WORK(name) WORK_##name,
#include "table.h"
    WORK_columns
};

#endif
