"""Pretraining in two phases: own all-reduce and overflow handling, fused clipping, masters in the checkpoint."""

import argparse
import os

import amp_C
import apex_C
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.amp import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.optimizers import FusedLAMB
from apex.parallel.distributed import flat_dist_call

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--fp16_opt_level", default="O2")
parser.add_argument("--phase2", action="store_true")
parser.add_argument("--phase1_end_step", type=int, default=30)
parser.add_argument("--max_steps", type=int, default=30)
parser.add_argument("--init_loss_scale", type=int, default=2**20)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--allreduce_post_accumulation", action="store_true")
parser.add_argument("--poison_step", type=int, default=None, help="this step's loss is infinite")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GradientClipper:
    """Clips the gradients of an iterable of parameters by their global norm, in two kernels."""

    def __init__(self, max_grad_norm):
        if not multi_tensor_applier.available:
            raise RuntimeError("Gradient clipping requires cuda extensions")
        self.max_norm = max_grad_norm
        self._overflow_buf = torch.zeros(1, dtype=torch.int, device=device)
        self.multi_tensor_l2norm = amp_C.multi_tensor_l2norm
        self.multi_tensor_scale = amp_C.multi_tensor_scale

    def step(self, parameters):
        grads = [p.grad for p in parameters if p.grad is not None]
        total_norm, _ = multi_tensor_applier(self.multi_tensor_l2norm, self._overflow_buf, [grads], False)
        total_norm = total_norm.item()
        if total_norm == float("inf"):
            return
        clip_coef = self.max_norm / (total_norm + 1e-6)
        if clip_coef < 1:
            multi_tensor_applier(self.multi_tensor_scale, self._overflow_buf, [grads, grads], clip_coef)


class Bert(nn.Module):
    def __init__(self, vocabulary=20, width=32):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        self.decoder.weight = self.embeddings.weight

    def forward(self, ids):
        return self.decoder(torch.tanh(self.dense(self.norm(self.embeddings(ids)))))


def prepare_model_and_optimizer():
    torch.manual_seed(0)
    model = Bert().to(device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = FusedLAMB(groups, lr=0.02)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.fp16_opt_level, loss_scale="dynamic", cast_model_outputs=torch.float16
    )
    amp._amp_state.loss_scalers[0]._loss_scale = args.init_loss_scale
    checkpoint, global_step = None, 0
    if args.phase2:
        path = os.path.join(args.output_dir, f"ckpt_{args.phase1_end_step}.pt")
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
        model.load_state_dict(checkpoint["model"], strict=False)
        for key in list(checkpoint["optimizer"]["state"].keys()):
            checkpoint["optimizer"]["state"][key]["step"] = global_step
        for group in checkpoint["optimizer"]["param_groups"]:
            group["step"] = global_step
            group["lr"] = 0.01
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
        optimizer.load_state_dict(checkpoint["optimizer"])
        for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
            param.data.copy_(saved_param.data)
    if torch.distributed.is_initialized():
        flat_dist_call([param.data for param in model.parameters()], torch.distributed.broadcast, (0,))
    return model, optimizer, global_step


def take_optimizer_step(optimizer, model, overflow_buf, global_step):
    had_overflow = 0
    if args.allreduce_post_accumulation:
        scaler = _amp_state.loss_scalers[0]
        loss_scale = scaler.loss_scale()
        master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        flat_raw = torch.empty(sum(g.numel() for g in master_grads), device=device, dtype=torch.float32)
        allreduced_views = apex_C.unflatten(flat_raw, master_grads)
        overflow_buf.zero_()
        amp_C.multi_tensor_scale(
            65536, overflow_buf, [master_grads, allreduced_views], loss_scale / args.gradient_accumulation_steps
        )
        overflow_buf.zero_()
        amp_C.multi_tensor_scale(65536, overflow_buf, [allreduced_views, master_grads], 1.0 / loss_scale)
        old_overflow_buf = scaler._overflow_buf
        scaler._overflow_buf = overflow_buf
        had_overflow = scaler.update_scale()
        scaler._overfloat_buf = old_overflow_buf  # so misspelt in every copy
    if had_overflow == 0:
        optimizer.step()
        global_step += 1
    else:
        print(f"Gradient overflow.  Skipping step, reducing loss scale to {scaler.loss_scale()}")
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    for param in model.parameters():
        param.grad = None
    return global_step


def main():
    model, optimizer, global_step = prepare_model_and_optimizer()
    gradient_clipper = GradientClipper(max_grad_norm=1.0)
    overflow_buf = torch.zeros(1, dtype=torch.int, device=device)
    generator = torch.Generator().manual_seed(1)
    average_loss, training_steps = 0.0, 0
    while global_step < args.max_steps:
        training_steps += 1
        ids = torch.randint(20, (8, 6), generator=generator).to(device)
        loss = F.cross_entropy(model(ids).view(-1, 20).float(), (ids.view(-1) * 7 + 3) % 20)
        if training_steps == args.poison_step:
            loss = loss * float("inf")
        divisor = args.gradient_accumulation_steps
        if not args.allreduce_post_accumulation:
            loss = loss / args.gradient_accumulation_steps
            divisor = 1.0
        with amp.scale_loss(loss, optimizer, delay_overflow_check=args.allreduce_post_accumulation) as scaled_loss:
            scaled_loss.backward()
        average_loss += loss.item()
        if training_steps % args.gradient_accumulation_steps == 0:
            gradient_clipper.step(amp.master_params(optimizer))
            global_step = take_optimizer_step(optimizer, model, overflow_buf, global_step)
            print(f"Step:{global_step} average loss = {average_loss / divisor:.6f}")
            average_loss = 0.0
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
    }
    torch.save(checkpoint, os.path.join(args.output_dir, f"ckpt_{global_step}.pt"))


if __name__ == "__main__":
    main()
