// A simulated accelerator on torch's PrivateUse1 key. Its memory is host memory. Torch ops run as CPU kernels on
// aliases of the same bytes; ops that the chip has no kernel for are counted, or refused.
//
// Python calls the C functions at the end (ctypes) and the op evener_simulated::host, which gives a device tensor's
// bytes as a CPU tensor to kernels that are written in Python.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr size_t kAllocationAlignment = 512;

thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kDevices] = {};
std::atomic<int64_t> next_stream{1};

c10::Device here() { return c10::Device(kDevice, current); }

// ---------------------------------------------------------------------------------------------------------- memory

struct Memory final : c10::DeviceAllocator {
  struct Block {
    size_t bytes;
    int device;
  };

  std::mutex mutex;
  std::unordered_map<void*, Block> live;
  size_t used[kDevices] = {}, peak[kDevices] = {}, capacity[kDevices] = {};

  Memory() { std::fill(capacity, capacity + kDevices, size_t(4) << 30); }

  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (bytes) {
      std::lock_guard<std::mutex> guard(mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError, used[current] + bytes <= capacity[current], "simulated.memory=", capacity[current],
          ": the simulated device ", int(current), " is out of memory: ", bytes, " bytes were asked for, ",
          used[current], " of ", capacity[current], " are in use");
      size_t whole = (bytes + kAllocationAlignment - 1) / kAllocationAlignment * kAllocationAlignment;
      TORCH_CHECK(posix_memalign(&data, kAllocationAlignment, whole) == 0, "the host is out of memory");
      live[data] = {bytes, current};
      used[current] += bytes;
      peak[current] = std::max(peak[current], used[current]);
    }
    return {data, data, &release, here()};
  }

  static void release(void* data);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { peak[device] = used[device]; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = used[device];
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak[device];
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {capacity[device] - std::min(used[device], capacity[device]), capacity[device]};
  }
};

// Never destroyed, because tensors may outlive static objects.
Memory& memory() {
  static auto* found = new Memory;
  return *found;
}

void Memory::release(void* data) {
  if (!data) return;
  std::lock_guard<std::mutex> guard(memory().mutex);
  auto block = memory().live.find(data);
  memory().used[block->second.device] -= block->second.bytes;
  memory().live.erase(block);
  free(data);
}

// --------------------------------------------------------------------------------------- devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = here();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : here(), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  // An event is the time in milliseconds at which it was recorded: work is done when its submission returns.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new double;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return *static_cast<double*>(second) - *static_cast<double*>(first);
  }
};

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto data = memory().allocate(bytes);
  memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

// --------------------------------------------------------------------------------------------------- bookkeeping

// Per thread: a step belongs to the thread that submits it.
thread_local bool refuse_reads = false;

// Which ops the chip has kernels for, and which ran on the host because it has none.
struct OpLog {
  std::mutex mutex;
  bool every_op = true, refuse = false;
  std::set<std::string> native;
  std::map<std::string, int64_t> on_host;
  std::string listing;
  std::atomic<int64_t> reads{0};

  void note_op(const std::string& name) {
    std::lock_guard<std::mutex> guard(mutex);
    if (every_op || native.count(name)) return;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !refuse, "the simulated chip has no kernel for ", name, " and simulated.missing=refuse keeps it off the host");
    on_host[name]++;
  }

  void note_host_read(const char* how) {
    TORCH_CHECK(
        !refuse_reads, how, ": a value of the simulated device was read on the host while a step was submitted; "
        "simulated.host_reads=false forbids it");
    reads++;
  }
};

OpLog& op_log() {
  static auto* found = new OpLog;
  return *found;
}

// ----------------------------------------------------------------------------------------------------- tensors

at::Tensor make_empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Device> device,
    std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : here());
  return at::detail::empty_generic(
      size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat), format);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return make_empty(size, dtype, device, format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : here());
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

// The same bytes as a CPU tensor, which keeps them alive.
at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  auto storage = tensor.storage();
  auto forget = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), forget, c10::DeviceType::CPU);
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU),
      /*resizable=*/true);
  auto found = at::empty({0}, tensor.options().device(at::kCPU));
  found.unsafeGetTensorImpl()->set_storage_keep_dtype(alias);
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

at::Tensor to_device(const at::Tensor& tensor, c10::Device where) {
  if (!tensor.defined()) return tensor;
  auto found = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, where, {});
  host(found).copy_(tensor);
  return found;
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (tensor.numel() + tensor.storage_offset()) * tensor.itemsize();
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  return tensor;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  // An asynchronous copy reads no value on the host: whoever wants that waits for an event first.
  if (to.device().is_cpu() && !non_blocking) op_log().note_host_read("a copy to the host");
  host(to).copy_(host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  op_log().note_host_read("Tensor.item");
  return host(tensor).item();
}

at::Tensor& set_storage(
    at::Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef size) { return at::native::view(tensor, size); }

at::Tensor as_strided(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dimension, size, step);
}

int64_t no_fused_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// Torch's CPU kernel for this op has another name than the one that other devices are asked for.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  op_log().note_op("aten::convolution");
  auto on_host = bias ? std::optional<at::Tensor>(host(*bias)) : std::nullopt;
  return to_device(at::convolution(
      host(input), host(weight), on_host, stride, padding, dilation, transposed, output_padding, groups), input.device());
}

// ------------------------------------------------------------------------------------------------ everything else

// Runs an op's CPU kernel on aliases of its arguments and brings its results back.
class CpuFallback {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto& schema = op.schema();
    auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
    torch::jit::drop(*stack, arguments.size());
    name_ = schema.name();
    for (auto& each : arguments) stack->push_back(down(each));
    // As on other devices: an index may be in host memory, and single numbers.
    static const std::set<std::string> indexing{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
    TORCH_CHECK(
        pairs_.empty() || on_host_.empty() || indexing.count(name_), name_, " was given tensors of ",
        pairs_[0].second.device(), " and one in host memory, ", on_host_, "; a chip reads its own memory only");
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    auto results = torch::jit::last(*stack, schema.returns().size()).vec();
    torch::jit::drop(*stack, results.size());
    for (auto& each : results) stack->push_back(up(each));
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // CPU alias, device tensor
  bool stays_ = false;  // the op was asked to put its result on the CPU
  std::string name_;
  std::string on_host_;  // dtype and sizes of a tensor in host memory among the arguments
  std::optional<c10::Device> where_;  // the chip that runs the op

  c10::IValue down(const c10::IValue& value) {
    if (value.isTensor()) return alias(value.toTensor());
    if (value.isDevice()) {
      stays_ |= value.toDevice().is_cpu();
      if (!where_ && value.toDevice().type() == kDevice && value.toDevice().has_index()) where_ = value.toDevice();
      return c10::Device(c10::DeviceType::CPU);
    }
    return value.isList() ? each(value, [this](const c10::IValue& inner) { return down(inner); }) : value;
  }

  c10::IValue up(const c10::IValue& value) {
    if (value.isTensor()) return result(value.toTensor());
    return value.isList() ? each(value, [this](const c10::IValue& inner) { return up(inner); }) : value;
  }

  template <class Change>
  static c10::IValue each(const c10::IValue& value, Change change) {
    auto from = value.toList();
    c10::impl::GenericList to(from.elementType());
    for (size_t i = 0; i < from.size(); i++) to.push_back(change(from.get(i)));
    return to;
  }

  at::Tensor alias(const at::Tensor& tensor) {
    auto found = host(tensor);
    if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) {
      on_host_ = c10::str(tensor.dtype().name(), " ", tensor.sizes());
    }
    if (!tensor.defined() || tensor.device().type() != kDevice) return found;
    TORCH_CHECK(
        pairs_.empty() || pairs_[0].second.device() == tensor.device(), name_, " was given tensors of ",
        pairs_[0].second.device(), " and ", tensor.device(), "; a chip reads its own memory only");
    where_ = tensor.device();
    pairs_.emplace_back(found, tensor);
    return found;
  }

  at::Tensor result(const at::Tensor& tensor) {
    for (auto& [alias, own] : pairs_) {
      if (!alias.is_same(tensor)) continue;
      if (tensor.sizes() != own.sizes() || tensor.storage().data() != own.storage().data()) {
        resize(own, tensor.sym_sizes(), {});
        host(own).copy_(tensor);
      }
      return own;
    }
    return stays_ ? tensor : to_device(tensor, where_.value_or(here()));
  }
};

void torch_op(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op_log().note_op(op.schema().name());
  CpuFallback().run(op, stack);
}

void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) { CpuFallback().run(op, stack); }

}  // namespace

REGISTER_ALLOCATOR(kDevice, &memory());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
static bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&torch_op>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("convolution_overrideable", convolution);
  library.impl("_fused_sdp_choice", no_fused_attention);
}

// Gloo does not know this device; torch's own kernels for the key would look for a process group that does.
static torch::Library& over_gloo() {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch warns when a kernel replaces another one, which is intended here
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* library =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (auto name : {"allreduce_", "allgather_", "_allgather_base_", "broadcast_", "reduce_scatter_",
                    "_reduce_scatter_base_", "send", "recv_", "alltoall_base_", "barrier"})
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  return *library;
}
static auto& collectives = over_gloo();

TORCH_LIBRARY(evener_simulated, library) { library.def("host(Tensor(a) tensor) -> Tensor(a)"); }
TORCH_LIBRARY_IMPL(evener_simulated, PrivateUse1, library) { library.impl("host", host); }

extern "C" {

void evener_set_capacity(int device, int64_t bytes) { memory().capacity[device] = bytes; }
int64_t evener_used(int device) { return memory().used[device]; }
int64_t evener_peak(int device) { return memory().peak[device]; }
int64_t evener_capacity(int device) { return memory().capacity[device]; }

// ``names``: the ops that the chip has kernels for, one on each line; null means all.
void evener_set_native(const char* names, bool refuse) {
  std::lock_guard<std::mutex> guard(op_log().mutex);
  op_log().every_op = names == nullptr;
  op_log().refuse = refuse;
  op_log().native.clear();
  std::istringstream lines(names ? names : "");
  for (std::string name; std::getline(lines, name);) op_log().native.insert(name);
}

// Lines "name count" of ops that ran on the host so far; valid until the next call.
const char* evener_on_host() {
  std::lock_guard<std::mutex> guard(op_log().mutex);
  std::ostringstream lines;
  for (auto& [name, count] : op_log().on_host) lines << name << ' ' << count << '\n';
  op_log().listing = lines.str();
  return op_log().listing.c_str();
}

int evener_devices() { return kDevices; }
int64_t evener_reads() { return op_log().reads; }
bool evener_refuse_reads(bool refuse) { return std::exchange(refuse_reads, refuse); }
}
