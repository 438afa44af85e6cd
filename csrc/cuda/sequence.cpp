// Kernels that Triton compiled, launched one after another in one call, as described by
// pyg_accel/backends/triton/sequence.py.
#include <cuda.h>

#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "cuda/check.cuh"
#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

constexpr uintptr_t kAlignment =
    16;  // bytes, of which Triton compiles loads of pointers like these

// Where the argument of a kernel comes from.
enum class Source : int64_t { kNumber, kArray, kTensor, kSize };

struct Argument {
  Source source;
  uint64_t value;  // of 32 bits, the address of an array, or which of the operands and new tensors,
                   // or which size of the call
};

// A number, or ceil(size * times / per) of a size of the call.
struct Count {
  int64_t size;  // which; -1 if it is a number
  int64_t times;
  int64_t per;

  int64_t of(const std::vector<int64_t>& sizes) const {
    return size < 0 ? times : (sizes.at(size) * times + per - 1) / per;
  }
};

struct Launch {
  CUfunction function;
  std::array<Count, 3> grid;
  unsigned threads;
  unsigned shared_bytes;
  std::vector<Argument> arguments;  // and null for the parameters that Triton appends
};

struct NewTensor {
  ScalarType type;
  bool zero;  // full of zeros
  std::vector<Count> shape;
};

struct Sequence {
  int32_t device;
  size_t operands;
  size_t results;  // the first of the new tensors; the others are only between kernels
  std::vector<NewTensor> fresh;
  std::vector<Launch> launches;
};

// Sequences by number, for any number of threads. Numbers are not used again.
class Table {
 public:
  int64_t add(Sequence sequence) {
    const auto made = std::make_shared<const Sequence>(std::move(sequence));
    const std::unique_lock lock(mutex_);
    sequences_.emplace(++last_, made);
    return last_;
  }

  void remove(int64_t number) {
    const std::unique_lock lock(mutex_);
    sequences_.erase(number);
  }

  std::shared_ptr<const Sequence> at(int64_t number) const {
    const std::shared_lock lock(mutex_);
    const auto found = sequences_.find(number);
    STD_TORCH_CHECK(found != sequences_.end(), "there is no sequence ", number);
    return found->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Sequence>> sequences_;
  int64_t last_ = 0;
};

Table& table() {
  static Table sequences;
  return sequences;
}

// A function of the driver, to which the library is not linked: it is to load without one.
template <class Function>
Function driver(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<Function>(found)
             : nullptr;
}

// The number of parameters of a kernel; -1 unless the first have these sizes, and all parameters
// that Triton appends are pointers.
int64_t parameters_of(CUfunction function, const std::vector<size_t>& sizes) {
  using Query = CUresult (*)(CUfunction, size_t, size_t*, size_t*);
  static const auto query = driver<Query>("cuFuncGetParamInfo", 12040);
  if (!query)
    return -1;
  size_t count = 0, offset = 0, size = 0;
  for (; query(function, count, &offset, &size) == CUDA_SUCCESS; ++count)
    if (size != (count < sizes.size() ? sizes[count] : sizeof(void*)))
      return -1;
  return count < sizes.size() ? -1 : static_cast<int64_t>(count);
}

// Reads the encoding of Python.
class Code {
 public:
  explicit Code(const std::vector<int64_t>& code) : code_(code) {}

  int64_t next() {
    STD_TORCH_CHECK(at_ < code_.size(), "expected more of a sequence");
    return code_[at_++];
  }

 private:
  const std::vector<int64_t>& code_;
  size_t at_ = 0;
};

// The number of a sequence in the table; 0 if a kernel takes other parameters than it says.
int64_t add_sequence(const std::vector<Tensor>& arrays, const std::vector<int64_t>& written) {
  Code code(written);
  Sequence made{};
  made.device = static_cast<int32_t>(code.next());
  made.operands = code.next();
  made.results = code.next();
  made.fresh.resize(code.next());
  STD_TORCH_CHECK(made.results <= made.fresh.size(), "expected results to be new tensors");
  for (NewTensor& fresh : made.fresh) {
    fresh.type = static_cast<ScalarType>(code.next());
    fresh.zero = code.next() != 0;
    fresh.shape.resize(code.next());
    for (Count& count : fresh.shape) {
      const bool is_size = code.next() != 0;
      const int64_t value = code.next();
      count = is_size ? Count{value, 1, 1} : Count{-1, value, 1};
    }
  }
  made.launches.resize(code.next());
  for (Launch& launch : made.launches) {
    launch.function = reinterpret_cast<CUfunction>(code.next());
    for (Count& programs : launch.grid) {
      programs.size = code.next();
      programs.times = code.next();
      programs.per = code.next();
    }
    launch.threads = static_cast<unsigned>(code.next());
    launch.shared_bytes = static_cast<unsigned>(code.next());
    std::vector<size_t> sizes(code.next());
    for (size_t& size : sizes) {
      Argument argument{static_cast<Source>(code.next()), 0};
      const bool is_number = argument.source == Source::kNumber || argument.source == Source::kSize;
      size = is_number ? sizeof(int32_t) : sizeof(void*);
      argument.value = code.next();
      if (argument.source == Source::kArray)
        argument.value = reinterpret_cast<uint64_t>(arrays.at(argument.value).const_data_ptr());
      else if (argument.source == Source::kTensor)
        STD_TORCH_CHECK(argument.value < made.operands + made.fresh.size(),
                        "expected an operand or a new tensor");
      launch.arguments.push_back(argument);
    }
    const int64_t count = parameters_of(launch.function, sizes);
    if (count < 0)
      return 0;
    launch.arguments.resize(count, {Source::kNumber, 0});
  }
  return table().add(std::move(made));
}

void remove_sequence(int64_t number) {
  table().remove(number);
}

// The results; nothing if an operand does not begin where kernels were compiled for it, or a size
// has more bits.
std::vector<Tensor> run_sequence(int64_t number,
                                 const std::vector<Tensor>& operands,
                                 const std::vector<int64_t>& sizes) {
  using Start = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, CUstream, void**, void**);
  static const auto start = driver<Start>("cuLaunchKernel", 4000);
  STD_TORCH_CHECK(start, "the driver has no cuLaunchKernel");
  const auto sequence = table().at(number);
  STD_TORCH_CHECK(operands.size() == sequence->operands && !operands.empty(), "expected ",
                  sequence->operands, " operands");
  std::vector<uint64_t> addresses;
  addresses.reserve(operands.size() + sequence->fresh.size());
  for (const Tensor& t : operands) {
    STD_TORCH_CHECK(is_on_device(t) && t.get_device_index() == sequence->device,
                    "expected operands on the device of the graph");
    addresses.push_back(reinterpret_cast<uint64_t>(t.const_data_ptr()));
    if (addresses.back() % kAlignment)
      return {};
  }
  for (const int64_t size : sizes)
    if (size > std::numeric_limits<int32_t>::max())
      return {};
  const auto guard = guard_of(operands[0]);
  const auto stream = reinterpret_cast<CUstream>(stream_of(operands[0]));
  std::vector<Tensor> made;
  made.reserve(sequence->fresh.size());
  std::vector<int64_t> shape;
  for (const NewTensor& fresh : sequence->fresh) {
    shape.clear();
    for (const Count& count : fresh.shape)
      shape.push_back(count.of(sizes));
    made.push_back(empty_result(operands[0], shape, fresh.type));
    void* const begin = made.back().mutable_data_ptr();
    addresses.push_back(reinterpret_cast<uint64_t>(begin));
    if (fresh.zero && made.back().numel() > 0)
      check(cudaMemsetAsync(begin, 0, made.back().numel() * made.back().element_size(), stream),
            "cannot fill a tensor with zeros");
  }
  std::vector<void*> parameters;
  for (const Launch& launch : sequence->launches) {
    parameters.clear();
    for (const Argument& argument : launch.arguments)
      parameters.push_back(argument.source == Source::kTensor
                               ? static_cast<void*>(&addresses[argument.value])
                           : argument.source == Source::kSize
                               ? const_cast<int64_t*>(&sizes.at(argument.value))
                               : static_cast<void*>(const_cast<uint64_t*>(&argument.value)));
    std::array<unsigned, 3> grid{};
    for (size_t i = 0; i < grid.size(); ++i)
      grid[i] = static_cast<unsigned>(launch.grid[i].of(sizes));
    const auto& [x, y, z] = grid;
    if (x == 0 || y == 0 || z == 0)
      continue;
    const CUresult error = start(launch.function, x, y, z, launch.threads, 1, 1,
                                 launch.shared_bytes, stream, parameters.data(), nullptr);
    STD_TORCH_CHECK(error == CUDA_SUCCESS, "a kernel could not be launched: CUDA error ",
                    static_cast<int>(error));
  }
  made.erase(made.begin() + static_cast<std::ptrdiff_t>(sequence->results), made.end());
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def("add_sequence(Tensor[] arrays, int[] code) -> int");
  m.def("remove_sequence(int sequence) -> ()");
  m.def("run_sequence(int sequence, Tensor[] operands, int[] sizes) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, CompositeExplicitAutograd, m) {
  m.impl("add_sequence", TORCH_BOX(&add_sequence));  // there may be no arrays
  m.impl("remove_sequence", TORCH_BOX(&remove_sequence));
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("run_sequence", TORCH_BOX(&run_sequence));
}

}  // namespace pyg_accel
