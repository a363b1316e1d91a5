// What the host issued, in issue order: see trace_row.h.
#pragma once

#include "runtime.h"
#include "trace_row.h"

#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace virtual_devices {

using Accesses = c10::SmallVector<TraceAccess, 8>;

inline TraceAccess whole(int64_t block) {
  return {block, 0, INT64_MAX};
}

// The access to a block; the end of the list if there is none.
inline TraceAccess* access_to(Accesses& accesses, int64_t block) {
  return std::find_if(accesses.begin(), accesses.end(), [&](const TraceAccess& one) { return one.block == block; });
}

// A row before it is added.
struct Record {
  int kind;
  int name = 0;
  int device = kHost;
  int64_t stream = 0;
  int64_t duration_ns = -1;
  int64_t bytes = 0;
  int64_t version = 0;
  int64_t block = 0;
  int peer = kHost;
  int64_t peer_stream = 0;
  int launches = 0;
  bool scratch = false;
  Accesses reads;
  Accesses writes;
};

// Autograd gives it to the threads that run a backward pass for the thread that called it.
struct BackwardPass final : c10::DebugInfoBase {
  explicit BackwardPass(int64_t version) : version(version) {}
  int64_t version;
};

inline int64_t current_pass() {
  const auto* pass = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO_2);
  return pass == nullptr ? 0 : static_cast<const BackwardPass*>(pass)->version;
}

// Whether this thread adds gradients up.
inline thread_local bool t_sums = false;

// Whether this thread asks what an operator gives: what it hands over to do so is not the program's.
inline thread_local bool t_asks = false;

// Adds the row of the node that this thread evaluates, if it has none yet: see nodes.h.
inline void note_node();

// Told the place of each row of a kernel or copy, in the thread that issued it.
using Watcher = void (*)(int64_t);
inline std::atomic<Watcher> g_watcher{nullptr};

class Trace {
 public:
  void start() {
    std::lock_guard<std::mutex> lock(mutex_);
    rows_.clear();
    accesses_.clear();
    on_ = true;
  }

  // Without a look at the node that the thread evaluates.
  void add_node(const Record& record) {
    std::lock_guard<std::mutex> lock(mutex_);
    push(record);
  }

  bool on() const {
    return on_;
  }

  void stop() {
    on_ = false;
  }

  // The place of a name in the table; equal names have one.
  int name(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [found, added] = places_.try_emplace(text, static_cast<int>(places_.size()));
    if (added) {
      names_ += "\n" + text;
    }
    return found->second;
  }

  // The place of the row; -1 while nothing is recorded.
  int64_t add(const Record& record) {
    if (!on_) {
      return -1;
    }
    note_node();
    int64_t row;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      push(record);
      row = static_cast<int64_t>(rows_.size()) - 1;
    }
    const Watcher watcher = g_watcher;
    if (watcher != nullptr && (record.kind == ROW_kernel || record.kind == ROW_copy)) {
      watcher(row);
    }
    return row;
  }

  // A record of a version of its own, made in one go, so that versions ascend in the trace.
  int64_t add_version(Record record) {
    if (on_) {
      note_node();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    record.version = ++versions_;
    if (on_) {
      push(record);
    }
    return record.version;
  }

  int64_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(rows_.size());
  }

  // Copies, valid until the next call: other threads may go on adding.
  const TraceRow* rows(int64_t* count) {
    std::lock_guard<std::mutex> lock(mutex_);
    rows_copy_ = rows_;
    *count = static_cast<int64_t>(rows_copy_.size());
    return rows_copy_.data();
  }

  const TraceAccess* accesses(int64_t* count) {
    std::lock_guard<std::mutex> lock(mutex_);
    accesses_copy_ = accesses_;
    *count = static_cast<int64_t>(accesses_copy_.size());
    return accesses_copy_.data();
  }

  // A line each; the first is empty.
  const char* names() {
    std::lock_guard<std::mutex> lock(mutex_);
    names_copy_ = names_;
    return names_copy_.c_str();
  }

 private:
  void push(const Record& record) {
    TraceRow row{};
    row.bytes = record.bytes;
    row.duration_ns = record.duration_ns;
    row.version = record.version;
    row.pass = current_pass();
    row.block = record.block;
    row.first_read = place();
    accesses_.insert(accesses_.end(), record.reads.begin(), record.reads.end());
    row.first_write = place();
    accesses_.insert(accesses_.end(), record.writes.begin(), record.writes.end());
    row.end_write = place();
    row.kind = record.kind;
    row.name = record.name;
    row.device = record.device;
    row.stream = static_cast<int32_t>(record.stream);
    row.peer = record.peer;
    row.peer_stream = static_cast<int32_t>(record.peer_stream);
    row.thread = thread_index();
    row.launches = record.launches;
    row.sums = t_sums;
    row.scratch = record.scratch;
    rows_.push_back(row);
  }

  int64_t place() const {
    return static_cast<int64_t>(accesses_.size());
  }

  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<TraceRow> rows_, rows_copy_;
  std::vector<TraceAccess> accesses_, accesses_copy_;
  std::unordered_map<std::string, int> places_{{"", 0}};
  std::string names_, names_copy_;
  int64_t versions_ = 0;
};

// Leaked, as blocks may be freed while the process ends.
inline Trace& trace() {
  static Trace* instance = new Trace;
  return *instance;
}

inline Record kernel_row(const std::string& name, int device) {
  Record row{ROW_kernel, trace().name(name), device, current_stream(device), t_duration_ns};
  row.launches = 1;
  return row;
}

// The host waits for a stream.
inline void trace_sync(int device, int64_t stream) {
  trace().add({ROW_sync_stream, 0, device, stream});
}

inline int64_t trace_event(int device, int64_t stream) {
  return trace().add_version({ROW_record, 0, device, stream});
}

inline void trace_wait(int device, int64_t stream, int64_t version) {
  Record wait{ROW_wait, 0, device, stream};
  wait.version = version;
  trace().add(wait);
}

inline void trace_barrier(int from, int64_t from_stream, int to, int64_t to_stream) {
  trace_wait(to, to_stream, trace_event(from, from_stream));
}

// A hand-over to another thread; 0 if it is none of the program's.
inline int64_t trace_signal() {
  return t_asks ? 0 : trace().add_version({ROW_signal});
}

inline void trace_await(int64_t version) {
  if (t_asks || version == 0) {
    return;
  }
  Record row{ROW_await};
  row.version = version;
  trace().add(row);
}

} // namespace virtual_devices
