// What the host issued: one record per kernel, copy, event, synchronisation, allocation and free, in issue order.
#pragma once

#include "runtime.h"

#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace virtual_devices {

using Blocks = std::vector<int64_t>;

struct Record {
  const char* kind; // see bed/trace.py
  std::string name; // of the operator
  int device = kHost;
  int64_t stream = 0;
  double duration = std::nan("");
  int64_t bytes = 0;
  int64_t version = 0; // of an event
  int peer = kHost; // the other device of a copy
  Blocks reads;
  Blocks writes;
  int thread = 0;
};

class Trace {
 public:
  bool on() const {
    return on_;
  }

  void start() {
    std::lock_guard<std::mutex> lock(mutex_);
    records_.clear();
    on_ = true;
  }

  void stop() {
    on_ = false;
  }

  void add(Record record) {
    if (!on_) {
      return;
    }
    record.thread = thread_index();
    std::lock_guard<std::mutex> lock(mutex_);
    records_.push_back(std::move(record));
  }

  // An event's version and its record are made in one go, so that versions ascend in the trace.
  int64_t record_event(int device, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t version = ++versions_;
    if (on_) {
      Record record{"record", "", device, stream};
      record.version = version;
      record.thread = thread_index();
      records_.push_back(std::move(record));
    }
    return version;
  }

  int64_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(records_.size());
  }

  // The records from index `begin` on, a line each; valid until the next call.
  const char* text(int64_t begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::ostringstream out;
    out.precision(17);
    for (size_t index = begin; index < records_.size(); ++index) {
      const Record& r = records_[index];
      out << r.kind << '\t' << r.name << '\t' << r.device << '\t' << r.stream << '\t' << r.thread << '\t'
          << r.duration << '\t' << r.bytes << '\t' << r.version << '\t' << r.peer << '\t';
      list(out, r.reads);
      out << '\t';
      list(out, r.writes);
      out << '\n';
    }
    text_ = out.str();
    return text_.c_str();
  }

 private:
  static void list(std::ostream& out, const Blocks& blocks) {
    for (size_t index = 0; index < blocks.size(); ++index) {
      out << (index ? "," : "") << blocks[index];
    }
  }

  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<Record> records_;
  std::string text_;
  int64_t versions_ = 0;
};

// Leaked, as blocks may be freed while the process ends.
inline Trace& trace() {
  static Trace* instance = new Trace;
  return *instance;
}

// The host waits for a stream, or for a device.
inline void trace_sync(int device, int64_t stream) {
  trace().add({"sync_stream", "", device, stream});
}

inline void trace_barrier(int from, int64_t from_stream, int to, int64_t to_stream) {
  Record wait{"wait", "", to, to_stream};
  wait.version = trace().record_event(from, from_stream);
  trace().add(std::move(wait));
}

} // namespace virtual_devices
