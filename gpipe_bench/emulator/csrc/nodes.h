// Backward passes, and which node of autograd issued which rows: the replay can then choose among nodes that are ready.
#pragma once

#include "trace.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <map>
#include <set>
#include <tuple>

namespace virtual_devices {

using torch::autograd::Node;

// Tells nodes apart, also one from an earlier one at the same address: by the thread that made it, and its place there.
using NodeKey = std::tuple<const Node*, uint64_t, uint64_t>;

inline NodeKey key_of(const Node& node) {
  return {&node, node.thread_id(), node.sequence_nr()};
}

// The node that this thread evaluates for a pass that is not nested, and whether its function was called.
thread_local NodeKey t_node{};
thread_local bool t_called = false;
// Passes that this thread runs inside of nodes.
thread_local int t_nested = 0;

// Numbers of nodes that wait for others, until they are evaluated: those of a backward pass that has failed never are.
class NodeNumbers {
 public:
  int64_t of(const Node& node) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [found, added] = numbers_.try_emplace(key_of(node), 0);
    if (added) {
      found->second = ++g_numbered;
    }
    return found->second;
  }

  int64_t take(const Node& node) {
    const int64_t number = of(node);
    std::lock_guard<std::mutex> lock(mutex_);
    numbers_.erase(key_of(node));
    return number;
  }

 private:
  std::mutex mutex_;
  std::map<NodeKey, int64_t> numbers_;
};

inline NodeNumbers& node_numbers() {
  static NodeNumbers* instance = new NodeNumbers;
  return *instance;
}

// The parameters whose gradients are kept for an update; other leaves are those of cells and of checkpoints.
class Parameters {
 public:
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    known_.clear();
  }

  void add(const void* tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    known_.insert(tensor);
  }

  bool has(const at::Tensor& tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    return known_.count(tensor.unsafeGetTensorImpl()) > 0;
  }

 private:
  std::mutex mutex_;
  std::set<const void*> known_;
};

inline Parameters& parameters() {
  static Parameters* instance = new Parameters;
  return *instance;
}

// The node of a parameter, or of another leaf.
inline const torch::autograd::AccumulateGrad* keeper(const Node& node) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
}

inline void add_node(const Node& node) {
  Record row{ROW_node};
  const auto* keeps = keeper(node);
  if (keeps != nullptr && !keeps->variable.grad().defined() && parameters().has(keeps->variable)) {
    row.launches = 1;
    row.peer = keeps->variable.device().index();
  }
  row.bytes = static_cast<int64_t>(std::min<uint64_t>(node.sequence_nr(), INT64_MAX));
  row.writes.push_back(whole(node_numbers().take(node)));
  for (const auto& edge : node.next_edges()) {
    if (edge.is_valid()) {
      row.reads.push_back(whole(node_numbers().of(*edge.function)));
    }
  }
  trace().add_node(row);
}

// Autograd may issue rows for a node before it calls its function, and after it has returned.
inline void note_node() {
  if (t_nested > 0) {
    return;
  }
  const auto node = torch::autograd::get_current_node();
  if (node && key_of(*node) != t_node) {
    t_node = key_of(*node);
    t_called = false;
    add_node(*node);
  }
}

inline std::unique_ptr<at::ObserverContext> call_node(const at::RecordFunction&) {
  const auto node = torch::autograd::get_current_node();
  t_sums = node && keeper(*node) != nullptr;
  if (t_nested == 0 && node && trace().on()) {
    // The same node may run once more, in another backward pass.
    t_node = t_called ? NodeKey{} : t_node;
    note_node();
    t_called = true;
  }
  return nullptr;
}

// What follows adds up the gradients of others.
inline void leave_node(const at::RecordFunction&, at::ObserverContext*) {
  t_sums = true;
}

inline void watch_nodes() {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&call_node, &leave_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

// Begins a backward pass, perhaps inside another one.
inline int64_t begin_backward() {
  const int64_t version = trace().add_version({ROW_backward});
  t_nested += current_pass() != 0;
  t_sums = false;
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::TEST_INFO_2, std::make_shared<BackwardPass>(version));
  return version;
}

inline void end_backward(int64_t version) {
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO_2);
  t_nested -= current_pass() != 0;
  t_sums = false;
  Record row{ROW_backward_end};
  row.version = version;
  trace().add(row);
}

} // namespace virtual_devices
