// simccl: a process-group backend of the cards. It moves bytes with a backend of the host (gloo),
// straight from and into the cards' memory, and adds what the host's backend lacks: a mean,
// coalescing, and a refusal of tensors that are not on a card.
#include "simccl.h"

#include "cards.h"
#include "device.h"
#include "faults.h"
#include "key.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <functional>
#include <thread>

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

// Work of the host's backend, and what is left to do once it has ended.
class CardWork final : public Work {
 public:
  // of_host: the parts are works of the host's backend, which nobody else has.
  CardWork(
      std::vector<WorkPtr> parts, std::function<void()> finish, Tensors results,
      bool of_host = false)
      : parts_(std::move(parts)), finish_(std::move(finish)), results_(std::move(results)),
        of_host_(of_host) {}

  bool isCompleted() override {
    const std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (!guard) return false;  // another thread waits for it
    if (ended_) return true;
    bool sound = true;
    for (const WorkPtr& part : parts_) {
      if (!part->isCompleted()) return false;
      sound = sound && part->isSuccess();
    }
    if (sound) end(kNoTimeout);  // who polls may read the results without a wait
    return true;
  }
  bool isSuccess() const override { return ended_; }
  std::vector<at::Tensor> result() override { return results_; }
  bool wait(std::chrono::milliseconds timeout) override {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!ended_) end(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    // A future may be asked for results at any time: it is made once they are there.
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(results_);
    return future;
  }

 private:
  // Once: waiting for a part again may run the host backend's own last step again.
  void end(std::chrono::milliseconds timeout) {
    for (const WorkPtr& part : parts_) part->wait(timeout);
    if (finish_) finish_();
    finish_ = nullptr;
    await_release();
    ended_ = true;
  }

  // The host backend's thread holds its work, and so the tensors, for a moment after it has ended. A
  // card's library does not: what is freed after a wait must be free, or peaks differ by chance.
  void await_release() {
    if (!of_host_) return;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (const WorkPtr& part : parts_) {
      while (part.use_count() > 1 && std::chrono::steady_clock::now() < limit) {
        std::this_thread::yield();
      }
    }
    parts_.clear();
  }

  std::mutex mutex_;
  std::vector<WorkPtr> parts_;
  std::function<void()> finish_;
  Tensors results_;
  bool of_host_;
  std::atomic<bool> ended_{false};
};

// A part that never ends, as with a peer that has died: waiting raises when its time is over.
class HungWork final : public Work {
 public:
  HungWork(std::string name, std::chrono::milliseconds limit)
      : name_(std::move(name)), limit_(limit) {}
  bool isCompleted() override { return false; }
  bool isSuccess() const override { return false; }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto limit = timeout == kNoTimeout ? limit_ : timeout;
    std::this_thread::sleep_for(limit);
    TORCH_CHECK_WITH(
        DistBackendError, false, "simccl ", name_, ": no answer within ", limit.count(),
        " ms; hung on purpose (ANYGAUGE_SIM_FAULTS)");
  }

 private:
  std::string name_;
  std::chrono::milliseconds limit_;
};

class SimCCL final : public c10d::Backend {
 public:
  SimCCL(c10::intrusive_ptr<c10d::Backend> host, std::chrono::milliseconds timeout)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)), timeout_(timeout) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("simccl", timeout_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    host_->setTimeout(timeout);
  }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }

  void startCoalescing() override {
    coalescing_ = true;
    waiting_.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    std::vector<WorkPtr> parts = std::move(waiting_);
    waiting_.clear();
    return c10::make_intrusive<CardWork>(std::move(parts), nullptr, Tensors());
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", tensors, tensors, [&] {
      Tensors host = views(tensors);
      return host_->broadcast(host, options);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    c10d::AllreduceOptions plain = options;
    const bool mean = without_mean(plain.reduceOp, tensors);
    return run(
        "all_reduce", tensors, tensors,
        [&] {
          Tensors host = views(tensors);
          return host_->allreduce(host, plain);
        },
        mean);
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<WorkPtr> parts;
    for (const at::Tensor& each : tensors) {
      Tensors one{each};
      parts.push_back(allreduce(one, options));
    }
    return c10::make_intrusive<CardWork>(std::move(parts), nullptr, tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    c10d::ReduceOptions plain = options;
    const bool mean = without_mean(plain.reduceOp, tensors) && options.rootRank == rank_;
    return run(
        "reduce", tensors, tensors,
        [&] {
          Tensors host = views(tensors);
          return host_->reduce(host, plain);
        },
        mean);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    return run("all_gather", inputs, flat(outputs), [&] {
      Tensors host = views(inputs);
      std::vector<Tensors> all = views(outputs);
      return host_->allgather(all, host, options);
    });
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run("all_gather_into_tensor", {input}, {output}, [&] {
      at::Tensor to = view(output), from = view(input);
      return host_->_allgather_base(to, from, options);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<WorkPtr> parts;
    for (size_t at = 0; at < outputs.size(); ++at) {
      parts.push_back(_allgather_base(outputs[at], inputs[at], options));
    }
    return c10::make_intrusive<CardWork>(std::move(parts), nullptr, outputs);
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::GatherOptions& options) override {
    return run("gather", inputs, flat(outputs), [&] {
      Tensors host = views(inputs);
      std::vector<Tensors> all = views(outputs);
      return host_->gather(all, host, options);
    });
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    return run("scatter", outputs, outputs, [&] {
      Tensors host = views(outputs);
      std::vector<Tensors> all = views(inputs);
      return host_->scatter(host, all, options);
    });
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    c10d::ReduceScatterOptions plain = options;
    const bool mean = without_mean(plain.reduceOp, outputs);
    return run(
        "reduce_scatter", flat(inputs), outputs,
        [&] {
          Tensors host = views(outputs);
          std::vector<Tensors> all = views(inputs);
          return host_->reduce_scatter(host, all, plain);
        },
        mean);
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    c10d::ReduceScatterOptions plain = options;
    const bool mean = without_mean(plain.reduceOp, {output});
    return run(
        "reduce_scatter_tensor", {input}, {output},
        [&] {
          at::Tensor to = view(output), from = view(input);
          return host_->_reduce_scatter_base(to, from, plain);
        },
        mean);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<WorkPtr> parts;
    for (size_t at = 0; at < outputs.size(); ++at) {
      parts.push_back(_reduce_scatter_base(outputs[at], inputs[at], options));
    }
    return c10::make_intrusive<CardWork>(std::move(parts), nullptr, outputs);
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return run("all_to_all", {input}, {output}, [&] {
      at::Tensor to = view(output), from = view(input);
      return host_->alltoall_base(to, from, output_sizes, input_sizes, options);
    });
  }

  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    // The host's backend has the form with one buffer only.
    Tensors flat_inputs, shapes;
    std::vector<int64_t> output_sizes, input_sizes;
    int64_t total = 0;
    for (const at::Tensor& each : inputs) {
      flat_inputs.push_back(view(each).reshape({-1}));
      input_sizes.push_back(each.numel());
    }
    for (const at::Tensor& each : outputs) {
      output_sizes.push_back(each.numel());
      total += each.numel();
    }
    at::Tensor from = at::cat(flat_inputs);
    at::Tensor to = at::empty({total}, from.options());
    Tensors targets = outputs;
    return run(
        "all_to_all", inputs, outputs,
        [&] { return host_->alltoall_base(to, from, output_sizes, input_sizes, options); }, false,
        [this, targets, to, output_sizes] {
          const Tensors parts = to.split_with_sizes(output_sizes);
          for (size_t at = 0; at < targets.size(); ++at) {
            view(targets[at]).copy_(parts[at].view(targets[at].sizes()));
          }
        });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return run("send", tensors, tensors, [&] {
      Tensors host = views(tensors);
      return host_->send(host, to, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run("recv", tensors, tensors, [&] {
      Tensors host = views(tensors);
      return host_->recv(host, from, tag);
    });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return run("recv", tensors, tensors, [&] {
      Tensors host = views(tensors);
      return host_->recvAnysource(host, tag);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return run("barrier", {}, {}, [&] { return host_->barrier(options); });
  }

 private:
  static at::Tensor view(const at::Tensor& tensor) {
    TORCH_CHECK(
        tensor.device().type() == c10::DeviceType::SIM_KEY, "simccl: the tensor is on ",
        tensor.device(), "; it speaks for simulated cards only");
    TORCH_CHECK(tensor.is_contiguous(), "simccl: tensors must be contiguous");
    return host_view(tensor);
  }
  static Tensors views(const Tensors& tensors) {
    Tensors all;
    for (const at::Tensor& each : tensors) all.push_back(view(each));
    return all;
  }
  static std::vector<Tensors> views(const std::vector<Tensors>& lists) {
    std::vector<Tensors> all;
    for (const Tensors& each : lists) all.push_back(views(each));
    return all;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const Tensors& each : lists) all.insert(all.end(), each.begin(), each.end());
    return all;
  }

  // The host's backend knows no mean: it gets a sum, and the mean is taken afterwards.
  static bool without_mean(c10d::ReduceOp& op, const Tensors& tensors) {
    if (op != c10d::ReduceOp::AVG) return false;
    for (const at::Tensor& each : tensors) {
      TORCH_CHECK(
          each.is_floating_point(), "simccl: the mean is of floating point numbers, not of ",
          each.scalar_type());
    }
    op = c10d::ReduceOp::SUM;
    return true;
  }

  WorkPtr run(
      const std::string& name, const Tensors& given, const Tensors& results,
      const std::function<WorkPtr()>& start, bool mean = false,
      std::function<void()> finish = nullptr) {
    uint64_t bytes = 0;
    for (const at::Tensor& each : given) bytes += each.nbytes();
    const int card = given.empty() ? current_card() : given.front().device().index();
    if (card >= 0 && (given.empty() || given.front().device().type() != c10::DeviceType::CPU)) {
      count_collective(card, name, bytes);
    }
    const CollectiveFault fault = collective_fault(name);
    TORCH_CHECK_WITH(
        DistBackendError, fault != CollectiveFault::fail, "simccl ", name,
        ": the link failed; on purpose (ANYGAUGE_SIM_FAULTS)");
    if (mean) {
      finish = [results, size = static_cast<double>(size_)] {
        for (const at::Tensor& each : results) host_view(each).div_(size);
      };
    }
    WorkPtr part = fault == CollectiveFault::hang
        ? WorkPtr(c10::make_intrusive<HungWork>(name, timeout_))
        : start();
    WorkPtr work = c10::make_intrusive<CardWork>(
        std::vector<WorkPtr>{std::move(part)}, std::move(finish), results, /*of_host=*/true);
    if (coalescing_) waiting_.push_back(work);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::chrono::milliseconds timeout_;
  bool coalescing_ = false;
  std::vector<WorkPtr> waiting_;
};

}  // namespace

void bind_simccl(pybind11::module_& module) {
  // torch.distributed has registered the classes that these derive from.
  pybind11::module_::import("torch.distributed");
  pybind11::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>>(module, "SimCCL")
      .def(
          pybind11::init([](const c10::intrusive_ptr<c10d::Backend>& host,
                            std::chrono::milliseconds timeout) {
            return c10::make_intrusive<SimCCL>(host, timeout);
          }),
          pybind11::arg("host"), pybind11::arg("timeout"));
}

}  // namespace sim
