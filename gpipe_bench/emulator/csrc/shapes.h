// Shapes only: nothing is computed. What an operator gives and what its kernels cost is asked of Python once, with
// meta tensors in place of its own, and remembered (outcomes.h).
#pragma once

#include "outcomes.h"
#include "resize.h"

namespace virtual_devices {

// Begins (1) and ends (0) a time in which Python sees the operators of this thread.
using Watch = void (*)(int);
std::atomic<Watch> g_watch{nullptr};

// What Python said of the operator that it saw.
struct Said {
  std::vector<Price> prices;
  std::string refusal;
  bool unsupported = false;
};
inline thread_local Said t_said;

// Meta tensors for the tensors of a call: those that share memory still do.
class Metas {
 public:
  explicit Metas(const std::vector<at::Tensor>& tensors) : ours_(tensors) {
    for (const at::Tensor& tensor : tensors) {
      metas_.push_back(tensor.device().is_cpu() && tensor.dim() == 0 ? tensor : made(tensor));
    }
  }

  at::Tensor operator()(const at::Tensor& tensor) const {
    for (size_t index = 0; index < ours_.size(); ++index) {
      if (ours_[index].is_same(tensor)) {
        return metas_[index];
      }
    }
    return tensor;
  }

  // Where a result comes from.
  Shape shape(const at::Tensor& result, const std::vector<at::Tensor>& before) const {
    if (!result.defined()) {
      return {Shape::kUndefined};
    }
    for (size_t index = 0; index < metas_.size(); ++index) {
      if (metas_[index].is_same(result)) {
        return {Shape::kArgument, index};
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.is_meta(), "a result must be on the device while only shapes are emulated, got one on ", result.device());
    Shape shape{Shape::kFresh};
    shape.sizes.assign(result.sizes().begin(), result.sizes().end());
    shape.strides.assign(result.strides().begin(), result.strides().end());
    shape.bytes = result.storage().nbytes();
    shape.dtype = result.dtype();
    shape.offset = result.storage_offset();
    if (!shares(metas_, result, Shape::kView, shape)) {
      shares(before, result, Shape::kSibling, shape);
    }
    return shape;
  }

  // Arguments that the operator resized follow.
  bool update() const {
    bool same = true;
    for (size_t index = 0; index < ours_.size(); ++index) {
      const at::Tensor& meta = metas_[index];
      c10::TensorImpl* ours = ours_[index].unsafeGetTensorImpl();
      if (meta.is_meta() && (meta.sizes() != ours->sizes() || meta.strides() != ours->strides())) {
        ours->set_sizes_and_strides(meta.sizes(), meta.strides());
        fit_storage(ours_[index]);
        same = false;
      }
    }
    return same;
  }

 private:
  static bool shares(const std::vector<at::Tensor>& others, const at::Tensor& result, Shape::Kind kind, Shape& shape) {
    for (size_t index = 0; index < others.size(); ++index) {
      const at::Tensor& other = others[index];
      if (other.defined() && other.is_meta() && other.is_alias_of(result)) {
        shape.kind = kind;
        shape.source = index;
        shape.offset -= other.storage_offset();
        return true;
      }
    }
    return false;
  }

  at::Tensor made(const at::Tensor& tensor) const {
    const c10::DispatchKeySet keys(c10::DispatchKey::Meta);
    for (size_t index = 0; index < metas_.size(); ++index) {
      if (ours_[index].is_alias_of(tensor)) {
        return shaped(metas_[index].storage(), keys, tensor);
      }
    }
    const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
    return shaped(at::empty({bytes}, at::TensorOptions(at::kMeta).dtype(at::kByte)).storage(), keys, tensor);
  }

  const std::vector<at::Tensor>& ours_;
  std::vector<at::Tensor> metas_;
};

inline void note(Outcome& outcome, const Metas& metas, const c10::IValue& result, std::vector<at::Tensor>& before) {
  const auto add = [&](const at::Tensor& tensor) {
    outcome.shapes.push_back(metas.shape(tensor, before));
    before.push_back(tensor);
  };
  if (!result.isTensorList()) {
    outcome.lists.push_back(-1);
    add(result.isTensor() ? result.toTensor() : at::Tensor());
    return;
  }
  const auto list = result.toTensorVector();
  outcome.lists.push_back(static_cast<int>(list.size()));
  std::for_each(list.begin(), list.end(), add);
}

inline std::shared_ptr<const Outcome> ask(
    const c10::OperatorHandle& op, const Stack& stack, size_t first, const Arguments& arguments) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Metas metas(arguments.tensors());
  Stack copies;
  for (size_t index = first; index < stack.size(); ++index) {
    const c10::IValue& value = stack[index];
    copies.push_back(value.isGenerator() ? c10::IValue() : mapped(value, c10::kMeta, metas));
  }
  t_said = {};
  {
    struct Watched {
      Watched() {
        t_asks = true;
        g_watch.load()(1);
      }
      ~Watched() {
        g_watch.load()(0);
        t_asks = false;
      }
    } watched;
    op.callBoxed(&copies);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!t_said.unsupported, t_said.refusal);
  TORCH_CHECK(t_said.refusal.empty(), t_said.refusal);
  auto outcome = std::make_shared<Outcome>();
  outcome->prices = t_said.prices;
  std::vector<at::Tensor> before;
  for (const c10::IValue& result : copies) {
    note(*outcome, metas, result, before);
  }
  outcome->keeps = metas.update();
  return outcome;
}

inline at::Tensor fresh(const Shape& shape, int device) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      shape.bytes,
      memory().make(device, shape.bytes),
      c10::GetAllocator(c10::DeviceType::PrivateUse1),
      true);
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, shape.dtype);
  made.unsafeGetTensorImpl()->set_storage_offset(shape.offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  return made;
}

inline at::Tensor view_of(const at::Tensor& source, const Shape& shape) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), shape.dtype);
  made.unsafeGetTensorImpl()->set_storage_offset(source.storage_offset() + shape.offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  return made;
}

inline at::Tensor made(const Shape& shape, int device, const Arguments& arguments, const std::vector<at::Tensor>& before) {
  switch (shape.kind) {
    case Shape::kArgument:
      return arguments.tensors()[shape.source];
    case Shape::kView:
      return view_of(arguments.tensors()[shape.source], shape);
    case Shape::kSibling:
      return view_of(before[shape.source], shape);
    case Shape::kFresh:
      return fresh(shape, device);
    default:
      return {};
  }
}

// What cuBLAS's handles hold from their first product in a recording to its end. A device has two handles: one thread runs
// forward passes, and autograd's runs backward passes.
class Workspaces {
 public:
  void need(int device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::DataPtr& held = held_[device][current_pass() != 0];
    if (bytes > 0 && held.get() == nullptr && trace().on()) {
      held = memory().make(device, bytes);
    }
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = {};
  }

 private:
  std::mutex mutex_;
  std::array<std::array<c10::DataPtr, 2>, kMaxDevices> held_;
};

// Leaked, as devices may be used while the process ends.
inline Workspaces& workspaces() {
  static Workspaces* instance = new Workspaces;
  return *instance;
}

// A row per kernel; scratch memory lives as long as its kernel.
inline void launch(Record row, const std::vector<Price>& prices) {
  const int64_t given = row.duration_ns;
  const size_t written = row.writes.size();
  for (const Price& price : prices) {
    workspaces().need(row.device, price.workspace_bytes);
    const c10::DataPtr scratch = memory().make(row.device, price.scratch_bytes, {}, true);
    row.name = price.name;
    row.duration_ns = given < 0 ? price.duration_ns : given;
    row.launches = price.launches;
    if (const Block* block = Memory::find(scratch)) {
      row.writes.push_back(whole(block->id));
    }
    trace().add(row);
    row.writes.resize(written);
  }
}

inline void add_accesses(Accesses& accesses, const c10::IValue& value) {
  if (value.isTensor()) {
    add_access(accesses, value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      add_accesses(accesses, item);
    }
  }
}

// Run an operator; its results take the place of its arguments on the stack.
inline void run_shapes(const c10::OperatorHandle& op, Stack* stack, int device) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const Arguments arguments(op, *stack, first);
  std::shared_ptr<const Outcome> outcome = arguments.known() ? outcomes().find(arguments.key()) : nullptr;
  if (outcome == nullptr) {
    outcome = ask(op, *stack, first, arguments);
    if (arguments.known() && outcome->keeps) {
      outcomes().add(arguments.key(), outcome);
    }
  }
  Record row{ROW_kernel, 0, device, current_stream(device), t_duration_ns};
  for (size_t index = first; index < stack->size(); ++index) {
    add_accesses(writes(schema.arguments()[index - first]) ? row.writes : row.reads, (*stack)[index]);
  }
  torch::jit::drop(*stack, schema.arguments().size());
  std::vector<at::Tensor> results;
  for (const Shape& shape : outcome->shapes) {
    results.push_back(made(shape, device, arguments, results));
    if (shape.kind == Shape::kFresh) {
      add_access(row.writes, results.back());
    }
  }
  launch(std::move(row), outcome->prices);
  const at::Tensor* next = results.data();
  for (const int count : outcome->lists) {
    if (count < 0) {
      stack->emplace_back(*next++);
    } else {
      stack->emplace_back(c10::List<at::Tensor>(c10::ArrayRef<at::Tensor>(next, count)));
      next += count;
    }
  }
}

// The same for a kernel that has arguments instead of a stack.
template <class... Values>
Stack call_shapes(const c10::OperatorHandle& op, int device, Values&&... values) {
  Stack stack{c10::IValue(std::forward<Values>(values))...};
  run_shapes(op, &stack, device);
  return stack;
}

} // namespace virtual_devices
