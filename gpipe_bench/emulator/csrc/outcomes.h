// The cache of shapes-only mode: operator, shapes, types and numbers of a call -> shapes of its results, and the cost of
// its kernels.
#pragma once

#include "operators.h"

#include <unordered_map>

namespace virtual_devices {

struct Price {
  int name;
  int64_t duration_ns;
  int64_t scratch_bytes;
  int64_t workspace_bytes; // of cuBLAS, if that runs it
  int launches;
};

// One tensor among the results.
struct Shape {
  enum Kind { kUndefined, kArgument, kView, kSibling, kFresh } kind;
  size_t source = 0; // of the arguments' tensors, or of the results
  c10::SmallVector<int64_t, 6> sizes, strides;
  int64_t offset = 0; // from that of its source
  size_t bytes = 0; // of its storage
  caffe2::TypeMeta dtype;
};

struct Outcome {
  std::vector<Price> prices;
  std::vector<Shape> shapes;
  // Of each result: how many tensors its list has, or -1.
  std::vector<int> lists;
  bool keeps = true; // no argument was resized
};

// The arguments of a call: its tensors, each once, and a key of all that the outcome depends on.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
    key_.reserve(512);
    put(&op.schema());
    // Of integers some operators make numbers of the default type.
    put(c10::get_default_dtype_as_scalartype());
    for (size_t index = first; index < stack.size(); ++index) {
      add(stack[index]);
    }
  }

  const std::string& key() const {
    return key_;
  }

  // False where the outcome cannot be remembered.
  bool known() const {
    return known_;
  }

  const std::vector<at::Tensor>& tensors() const {
    return tensors_;
  }

 private:
  template <class Value>
  void put(const Value& value) {
    key_.append(reinterpret_cast<const char*>(&value), sizeof(Value));
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isList()) {
      const auto items = value.toListRef();
      put('[');
      put(items.size());
      for (const c10::IValue& item : items) {
        add(item);
      }
    } else if (value.isInt()) {
      put('i');
      put(value.toInt());
    } else if (value.isDouble()) {
      put('d');
      put(value.toDouble());
    } else if (value.isBool()) {
      put(value.toBool() ? 't' : 'f');
    } else if (value.isComplexDouble()) {
      put('c');
      put(value.toComplexDouble());
    } else if (value.isString()) {
      put('s');
      key_ += value.toStringRef();
      put('\0');
    } else if (value.isNone() || value.isDevice() || value.isGenerator()) {
      put('-');
    } else {
      known_ = false;
    }
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      put('u');
      return;
    }
    for (size_t index = 0; index < tensors_.size(); ++index) {
      if (tensors_[index].is_same(tensor)) {
        put('=');
        put(index);
        return;
      }
    }
    describe(tensor);
    for (size_t index = 0; index < tensors_.size(); ++index) {
      if (tensors_[index].storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        put('@');
        put(index);
        put(tensor.storage_offset() - tensors_[index].storage_offset());
        break;
      }
    }
    tensors_.push_back(tensor);
  }

  void describe(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    put(is_ours(tensor) ? 'T' : 'C');
    put(tensor.scalar_type());
    put(impl->is_wrapped_number());
    put(tensor.is_conj());
    put(tensor.is_neg());
    put(tensor.dim());
    for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
      put(tensor.size(axis));
      put(tensor.stride(axis));
    }
  }

  std::string key_;
  bool known_ = true;
  std::vector<at::Tensor> tensors_;
};

class Outcomes {
 public:
  std::shared_ptr<const Outcome> find(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = outcomes_.find(key);
    return found == outcomes_.end() ? nullptr : found->second;
  }

  void add(const std::string& key, std::shared_ptr<const Outcome> outcome) {
    std::lock_guard<std::mutex> lock(mutex_);
    outcomes_[key] = std::move(outcome);
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    outcomes_.clear();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Outcome>> outcomes_;
};

inline Outcomes& outcomes() {
  static Outcomes* instance = new Outcomes;
  return *instance;
}

} // namespace virtual_devices
