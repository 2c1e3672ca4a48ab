// A simulated CUDA device for a CPU build of PyTorch: the numbers of a tensor on "cuda:N" are in the
// host's memory, and each operator that reaches the device runs PyTorch's kernel for CPUs on them.
//
// A tensor of the device is an ordinary one (its type is torch.Tensor) whose storage keeps a storage
// of the CPU, its twin. `run` is the fallback of the dispatch key CUDA: it gives the twins to the
// operator, and tensors of the device back. Dispatch, autograd, autocast, composite operators, views,
// versions, files and the threads of autograd are PyTorch's own.
//
// `run` notes what a GPU would: waits of the host, devices that mix, operators on one stream that use
// what another one has not finished, and what happens while a CUDA graph is captured.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {
using namespace c10;
using at::Tensor;
using Stack = std::vector<IValue>;
using Place = std::pair<int, int64_t>;  // A stream: its device and its number.

constexpr int DEVICES = 2;
std::recursive_mutex mutex;
thread_local DeviceIndex current = 0;
thread_local int64_t streams[DEVICES] = {0};
std::atomic<int64_t> last_stream{0}, last_event{0};

// --- What is noted -----------------------------------------------------------------------------

std::vector<std::string> waits, races;
bool waits_raise = false;

struct Call {
  OperatorHandle op;
  Stack arguments, results;
};
struct Graph {
  std::deque<Call> calls;
  // The numbers of storages that are written while the graph is captured, as they were before.
  std::map<StorageImpl*, std::pair<Storage, std::string>> before;
  std::set<StorageImpl*> made;
};
std::vector<Graph> graphs;
Graph* captured = nullptr;

// Vector clocks: for each stream, what has happened on others before its last operator.
using Clock = std::map<Place, int64_t>;
struct Use {
  Place stream;
  int64_t at;
  std::string name;
};
std::map<Place, Clock> clocks;
std::map<int64_t, Clock> events;
Clock host;  // What the host has waited for, so that everything it starts comes after.
std::map<StorageImpl*, Use> writes;
std::map<StorageImpl*, std::map<Place, Use>> reads;

void merge(Clock& into, const Clock& other) {
  for (auto& [stream, at] : other) into[stream] = std::max(into[stream], at);
}

std::string written(Place p) { return std::to_string(p.first) + ":" + std::to_string(p.second); }

void wait(const std::string& name, Place stream) {
  std::lock_guard lock(mutex);
  TORCH_CHECK(!captured, "CUDA error: operation not permitted when stream is capturing (", name, ")");
  TORCH_CHECK(!waits_raise, "called a synchronizing CUDA operation (", name, ")");
  waits.push_back(name);
  merge(host, clocks[stream]);
}

// --- Memory ------------------------------------------------------------------------------------

void delete_twin(void* twin) {
  // Deleted: another storage may get the address.
  {
    std::lock_guard lock(mutex);
    auto* key = static_cast<Storage*>(twin)->unsafeGetStorageImpl();
    writes.erase(key), reads.erase(key);
  }
  delete static_cast<Storage*>(twin);
}

DataPtr with_twin(const Storage& twin, Device device) {
  return {twin.mutable_data(), new Storage(twin), &delete_twin, device};
}

const Storage& twin_of(const Storage& storage) {
  return *static_cast<Storage*>(storage.data_ptr().get_context());
}

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t size) override {
    auto* cpu = GetCPUAllocator();
    auto bytes = Storage::use_byte_size_t();
    return with_twin(Storage(bytes, size, cpu->allocate(size), cpu, true), Device(kCUDA, current));
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} device_memory;

std::set<const void*> pinned;
struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t size) override {
    void* data = alloc_cpu(size);
    std::lock_guard lock(mutex);
    pinned.insert(data);
    return {data, data, &release, Device(kCPU)};
  }
  static void release(void* data) {
    std::lock_guard lock(mutex);
    pinned.erase(data);
    free_cpu(data);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} pinned_memory;

Storage on_device(const Storage& twin, Device device) {
  auto bytes = Storage::use_byte_size_t();
  return Storage(bytes, twin.nbytes(), with_twin(twin, device), &device_memory, true);
}

Tensor with_storage(const Storage& storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj()), impl->_set_neg(like.is_neg());
  return made;
}

// --- Operators ---------------------------------------------------------------------------------

struct Arguments {
  std::string name;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // Tensors of the device, and their twins.
  std::unordered_map<TensorImpl*, size_t> at;    // Places in these, of either.
  std::vector<Tensor> others, written;           // Tensors of the host; those that are written.
  std::map<StorageImpl*, Storage> known;         // Storages of the device by their twins.
  std::set<std::string> devices;
  std::optional<Device> device;
  bool is_factory = false;

  Tensor twin(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) {
      if (t.defined()) others.push_back(t);
      return t;
    }
    auto known_twin = at.find(t.unsafeGetTensorImpl());
    if (known_twin != at.end()) return pairs[known_twin->second].second;
    Tensor cpu;
    if (t.is_sparse()) {
      auto* of = at::sparse::get_sparse_impl(t);
      cpu = at::_sparse_coo_tensor_unsafe(twin(of->indices()), twin(of->values()), t.sizes());
      cpu._coalesced_(of->coalesced());
    } else {
      auto& storage = twin_of(t.storage());
      known.emplace(storage.unsafeGetStorageImpl(), t.storage());
      cpu = with_storage(storage, DispatchKey::CPU, t);
    }
    at[t.unsafeGetTensorImpl()] = at[cpu.unsafeGetTensorImpl()] = pairs.size();
    pairs.emplace_back(t, cpu);
    if (!device) device = t.device();
    devices.insert(t.device().str());
    return cpu;
  }

  Tensor ours(const Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    auto of_input = at.find(cpu.unsafeGetTensorImpl());
    if (of_input != at.end()) return pairs[of_input->second].first;
    for (auto& t : others)
      if (t.is_same(cpu)) return cpu;
    if (cpu.is_sparse()) {
      auto keys = DispatchKeySet(DispatchKey::SparseCUDA);
      auto made = at::detail::make_tensor<at::SparseTensorImpl>(keys, cpu.dtype());
      copy_sparse(made, cpu);
      return made;
    }
    return with_storage(storage(cpu.storage()), DispatchKey::CUDA, cpu);
  }

  void copy_sparse(const Tensor& to, const Tensor& from) {
    auto *of = at::sparse::get_sparse_impl(to), *cpu = at::sparse::get_sparse_impl(from);
    of->raw_resize_(cpu->sparse_dim(), cpu->dense_dim(), from.sizes());
    at::sparse::alias_into_sparse(to, ours(cpu->indices()), ours(cpu->values()));
    of->set_coalesced(cpu->coalesced());
  }

  Storage storage(const Storage& cpu) {
    auto found = known.find(cpu.unsafeGetStorageImpl());
    if (found != known.end()) return found->second;
    return known.emplace(cpu.unsafeGetStorageImpl(), on_device(cpu, *device)).first->second;
  }

  IValue twins(const IValue& value) {
    if (value.isTensor()) return twin(value.toTensor());
    if (value.isTensorList()) {
      List<Tensor> made;
      for (const Tensor& t : value.toTensorVector()) made.push_back(twin(t));
      return made;
    }
    if (value.isOptionalTensorList()) {
      List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        made.push_back(t ? std::optional(twin(*t)) : t);
      return made;
    }
    if (value.isStorage() && value.toStorage().device().is_cuda()) {
      auto& cpu = twin_of(value.toStorage());
      known.emplace(cpu.unsafeGetStorageImpl(), value.toStorage());
      return cpu;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
      if (!device->has_index()) device = Device(kCUDA, current);
      is_factory = true;
      return Device(kCPU);
    }
    return value;
  }

  IValue results(const IValue& value) {
    if (value.isTensor()) return ours(value.toTensor());
    if (!value.isTensorList()) return value;
    List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(ours(t));
    return made;
  }

  // Operators may have resized what they write, or given it another storage.
  void follow() {
    for (auto& [t, cpu] : pairs) {
      if (t.is_sparse()) {
        for (auto& w : written)
          if (w.is_same(t)) copy_sparse(t, cpu);
        continue;
      }
      auto* impl = t.unsafeGetTensorImpl();
      auto now = storage(cpu.storage());
      if (now.unsafeGetStorageImpl() != t.storage().unsafeGetStorageImpl())
        impl->set_storage_keep_dtype(now);
      else if (now.nbytes() != cpu.storage().nbytes() || now.data() != cpu.storage().data()) {
        now.set_data_ptr_noswap(with_twin(cpu.storage(), t.device()));
        now.set_nbytes(cpu.storage().nbytes());
      }
      if (t.sizes() != cpu.sizes() || t.strides() != cpu.strides() ||
          t.storage_offset() != cpu.storage_offset())
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
};

bool starts(const std::string& name, const std::string& with) { return name.rfind(with, 0) == 0; }

const std::set<std::string> WAITING = {
    "_local_scalar_dense", "nonzero",  "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive",  "_coalesce", "equal",        "repeat_interleave"};

// ATen's copies wait unless they are `non_blocking`; then those to memory that is not pinned do.
void wait_for_a_copy(const Arguments& found, const Stack& given) {
  const Tensor &to = given[0].toTensor(), &from = given[1].toTensor();
  if (to.is_cuda() && from.is_cuda()) return;
  bool non_blocking = given[2].toBool();
  auto& host_side = to.is_cuda() ? from : to;
  bool is_pinned;
  {
    std::lock_guard lock(mutex);
    is_pinned = pinned.count(host_side.storage().data());
    TORCH_CHECK(!captured || (non_blocking && is_pinned),
                "CUDA error: operation not permitted when stream is capturing (a copy between "
                "device and host)");
  }
  auto device = found.device->index();
  if (!non_blocking || (to.is_cpu() && !is_pinned))
    wait(to.is_cuda() ? "copy from the host" : "copy to the host", {device, streams[device]});
}

void check_devices(const Arguments& found, const FunctionSchema& schema, const Stack& given) {
  std::set<std::string> devices = found.devices;
  // Kernels that take the address of a number, which has to be on the device.
  bool takes_addresses = starts(found.name, "_amp_") || starts(found.name, "_fused_") ||
                         (starts(found.name, "_foreach_") && schema.overload_name() == "Tensor");
  std::set<const void*> numbers;
  for (size_t i = 0; i < given.size(); ++i)
    if (schema.arguments()[i].name() == "lr" && given[i].isTensor())
      numbers.insert(given[i].toTensor().unsafeGetTensorImpl());
  for (auto& t : found.others)
    if (!numbers.count(t.unsafeGetTensorImpl()) && (t.dim() > 0 || takes_addresses))
      devices.insert("cpu");
  std::string all;
  for (auto& each : devices) all += (all.empty() ? "" : " and ") + each;
  TORCH_CHECK(devices.size() < 2, "Expected all tensors to be on the same device, but found at "
              "least two devices, ", all, "! (", found.name, ")");
}

// Notes an operator on the current stream, and what it uses that another stream has not finished.
void on_stream(const Arguments& found, const std::vector<StorageImpl*>& made, bool overwrites) {
  std::lock_guard lock(mutex);
  std::set<int> devices;
  for (auto& [t, cpu] : found.pairs) devices.insert(t.device().index());
  if (devices.empty()) devices.insert(found.device->index());
  Clock all;
  // A copy from GPU to GPU waits for the streams of both, and both wait for it.
  for (int device : devices) merge(all, clocks[{device, streams[device]}]);
  merge(all, host);
  for (int device : devices) all[{device, streams[device]}]++;
  Place stream{*devices.begin(), streams[*devices.begin()]};
  for (int device : devices) clocks[{device, streams[device]}] = all;
  std::set<StorageImpl*> writing, reading;
  auto keys = [](const Tensor& t, std::set<StorageImpl*>& into) {
    if (!t.is_sparse()) return void(into.insert(twin_of(t.storage()).unsafeGetStorageImpl()));
    auto* of = at::sparse::get_sparse_impl(t);
    for (auto& part : {of->indices(), of->values()})
      into.insert(twin_of(part.storage()).unsafeGetStorageImpl());
  };
  for (auto& t : found.written) keys(t, writing);
  for (auto& [t, cpu] : found.pairs) keys(t, reading);
  if (overwrites) for (auto* key : writing) reading.erase(key);
  auto check = [&](const Use& use, const char* what) {
    if (all[use.stream] < use.at)
      races.push_back(found.name + " on stream " + written(stream) + what + use.name +
                      " on stream " + written(use.stream));
  };
  for (auto* of : {&reading, &writing})
    for (auto* key : *of)
      if (writes.count(key)) check(writes[key], " uses the unfinished result of ");
  for (auto* key : writing)
    for (auto& [_, use] : reads[key]) check(use, " overwrites what is read by ");
  for (auto* key : reading) reads[key][stream] = {stream, all[stream], found.name};
  for (auto* key : made) writing.insert(key);
  for (auto* key : writing) {
    writes[key] = {stream, all[stream], found.name};
    reads.erase(key);
  }
}

void keep_before(const Arguments& found) {
  for (auto& [t, cpu] : found.pairs) {
    if (t.is_sparse()) continue;
    auto storage = cpu.storage();
    auto* key = storage.unsafeGetStorageImpl();
    if (captured->made.count(key) || captured->before.count(key)) continue;
    std::string bytes(static_cast<const char*>(storage.data()), storage.nbytes());
    captured->before.emplace(key, std::pair(storage, bytes));
  }
}

void run(const OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto& schema = op.schema();
  size_t count = schema.arguments().size();
  Stack given(stack->end() - count, stack->end()), twins;
  stack->resize(stack->size() - count);
  Arguments found{schema.name().substr(schema.name().find(':') + 2)};
  for (size_t i = 0; i < count; ++i) {
    auto& argument = schema.arguments()[i];
    bool pins = argument.name() == "pin_memory" && !given[i].isNone();
    twins.push_back(pins ? IValue(false) : found.twins(given[i]));
    if (argument.alias_info() && argument.alias_info()->isWrite()) {
      if (given[i].isTensor() && given[i].toTensor().is_cuda())
        found.written.push_back(given[i].toTensor());
      if (given[i].isTensorList())
        for (const Tensor& t : given[i].toTensorVector()) found.written.push_back(t);
    }
  }
  if (!found.device) found.device = Device(kCUDA, current);
  auto index = found.device->index();
  bool copies = found.name == "copy_", indexes = starts(found.name, "index");
  if (copies)
    wait_for_a_copy(found, given);
  else if (!indexes)
    check_devices(found, schema, given);
  // Indices of the host are moved to the device; of a mask the host has to know how much is true.
  bool waits_for_indices = false;
  for (auto& t : found.others) waits_for_indices |= indexes && t.dim() > 0;
  if (indexes && count > 1 && given[1].isOptionalTensorList())
    for (const std::optional<Tensor>& t : given[1].toOptionalTensorVector())
      waits_for_indices |= t && (t->scalar_type() == kBool || t->scalar_type() == kByte);
  if (WAITING.count(found.name) || waits_for_indices) wait(found.name, {index, streams[index]});

  bool aliases = false, is_view = false;
  for (auto& result : schema.returns()) {
    aliases |= result.alias_info() != nullptr;
    is_view |= result.alias_info() && !result.alias_info()->isWrite();
  }
  // A batch normalization writes to statistics without declaring it.
  if (captured) keep_before(found);
  Stack results = twins;
  op.callBoxed(&results);
  std::vector<StorageImpl*> made;
  auto makes = [&](const Tensor& t) {
    if (!t.defined() || t.is_sparse() || !t.is_cpu()) return;
    for (auto& other : found.others)
      if (other.is_same(t)) return;
    auto* key = t.storage().unsafeGetStorageImpl();
    if (!found.known.count(key)) made.push_back(key);
  };
  for (auto& value : results) {
    if (value.isTensor()) makes(value.toTensor());
    if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) makes(t);
  }
  found.follow();
  if (captured) {
    captured->made.insert(made.begin(), made.end());
    if (!is_view) captured->calls.push_back({op, twins, results});
  }
  bool is_free = is_view || starts(found.name, "empty") || starts(found.name, "new_empty") ||
                 starts(found.name, "set_") || found.name == "_local_scalar_dense";
  bool overwrites = copies || found.name == "fill_" || found.name == "zero_" ||
                    schema.overload_name() == "out";
  if (!is_free) on_stream(found, made, overwrites);
  for (auto& value : results) stack->push_back(found.results(value));
}

// --- The driver that PyTorch asks for ------------------------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  static DeviceIndex index(Device d) { return d.has_index() ? d.index() : current; }
  static Stream stream(Device d, int64_t id) {
    return Stream(Stream::UNSAFE, Device(kCUDA, index(d)), id);
  }
  static Place place(const Stream& s) { return {s.device_index(), s.id()}; }
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device d) const override {
    return Device(kCUDA, std::exchange(current, index(d)));
  }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device d) const override { current = index(d); }
  void uncheckedSetDevice(Device d) const noexcept override { current = index(d); }
  Stream getStream(Device d) const override { return stream(d, streams[index(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream(d, ++last_stream); }
  Stream getNewStream(Device d, int) const override { return stream(d, ++last_stream); }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device(), std::exchange(streams[s.device_index()], s.id()));
  }
  void record(void** event, const Stream& s, DeviceIndex, EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(++last_event);
    std::lock_guard lock(mutex);
    events[reinterpret_cast<int64_t>(*event)] = clocks[place(s)];
  }
  void block(void* event, const Stream& s) const override {
    std::lock_guard lock(mutex);
    merge(clocks[place(s)], events[reinterpret_cast<int64_t>(event)]);
  }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { wait("synchronize", place(s)); }
  void synchronizeEvent(void* event) const override {
    wait("synchronize", {});
    std::lock_guard lock(mutex);
    merge(host, events[reinterpret_cast<int64_t>(event)]);
  }
  void synchronizeDevice(DeviceIndex d) const override {
    std::lock_guard lock(mutex);
    wait("synchronize", {d, streams[d]});
    for (auto& [place, clock] : clocks) if (place.first == d) merge(host, clock);
  }
  bool isStreamCapturing(const Stream&) const override { return captured; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(mutex);
    return pinned.count(data);
  }
};
}  // namespace
namespace at { REGISTER_CUDA_HOOKS(CUDAHooks); }

auto runs() { return torch::CppFunction::makeFromBoxedFunction<&run>(); }

// Each operator that has a kernel for the CPU runs it; others are made of these by PyTorch.
void take_all(torch::Library& library, DispatchKey cpu, DispatchKey ours) {
  for (auto& name : Dispatcher::singleton().getAllOpNames()) {
    auto op = Dispatcher::singleton().findOp(name);
    if (op && starts(name.name, "aten::") && op->hasKernelForDispatchKey(cpu) &&
        !op->hasKernelForDispatchKey(ours))
      library.impl(toString(name).c_str(), runs());
  }
}

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  take_all(library, DispatchKey::SparseCPU, DispatchKey::SparseCUDA);
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  take_all(library, DispatchKey::CPU, DispatchKey::CUDA);
  // These have one kernel for all devices, which does not know this one, or is not as strict.
  for (auto* name : {"copy_", "_foreach_mul.Tensor", "_foreach_mul_.Tensor", "_foreach_div.Tensor",
                     "_foreach_div_.Tensor", "_foreach_add.Tensor", "_foreach_add_.Tensor"})
    library.impl(name, runs());
}

// --- What Python calls --------------------------------------------------------------------------

extern "C" {
void simulated_start() { SetAllocator(kCUDA, &device_memory); }
int simulated_exchange_device(int device) { return device < 0 ? current : std::exchange(current, device); }
void simulated_waits_raise(bool raise) { waits_raise = raise; }
// Copies the waits or the races, a line each, and forgets them; returns the size, which may be more
// than fits: then nothing is forgotten.
int64_t simulated_take(bool of_races, char* to, int64_t size) {
  std::lock_guard lock(mutex);
  auto& lines = of_races ? races : waits;
  std::string all;
  for (auto& line : lines) all += line + "\n";
  if (static_cast<int64_t>(all.size()) < size) {
    std::copy(all.begin(), all.end(), to), to[all.size()] = 0;
    lines.clear();
  }
  return all.size();
}
// Begins to capture a graph, and returns its number.
int simulated_capture_begin() {
  std::lock_guard lock(mutex);
  graphs.reserve(10000);
  graphs.emplace_back();
  captured = &graphs.back();
  return graphs.size() - 1;
}
// Ends it: while a graph is captured, no number changes.
void simulated_capture_end() {
  std::lock_guard lock(mutex);
  for (auto& [key, kept] : captured->before)
    memcpy(kept.first.mutable_data(), kept.second.data(), kept.second.size());
  captured->before.clear();
  captured = nullptr;
}
void simulated_replay(int number) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto copy = [](const Tensor& to, const Tensor& from) {
    if (to.defined() && !to.is_same(from) && to.storage().data() != from.storage().data()) to.copy_(from);
  };
  for (auto& call : graphs[number].calls) {
    Stack results = call.arguments;
    call.op.callBoxed(&results);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].isTensor()) copy(call.results[i].toTensor(), results[i].toTensor());
      if (results[i].isTensorList())
        for (size_t j = 0; j < results[i].toTensorVector().size(); ++j)
          copy(call.results[i].toTensorVector()[j], results[i].toTensorVector()[j]);
    }
  }
}
void simulated_forget(int number) { graphs[number] = Graph(); }
}

